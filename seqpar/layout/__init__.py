"""Layouts and masks: which rank holds which tokens, and which query attends to which key."""
