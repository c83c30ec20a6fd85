"""Complete training scripts for published models on many GPUs, with predicted time and memory.

`recipe.py` chooses the settings, `memory_account.py` adds up what a GPU holds, and `scripts.py`
fills in a template, one `.txt` file for each kind of script.
"""
