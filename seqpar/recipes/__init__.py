"""Complete training scripts for published models on many GPUs, with predicted time and memory.

`recipe.py` chooses the settings, `memory_account.py` predicts the memory of a GPU, and `scripts.py`
fills in a template. There is one template, a `.txt` file, for each kind of script.
"""
