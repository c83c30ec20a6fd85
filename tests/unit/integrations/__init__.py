"""Tests of interfaces of other libraries."""
