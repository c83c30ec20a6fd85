"""Say who holds which tokens, who may see whom, and what that costs."""
