"""The attention that an enabled model's layers call in place of transformers' functions.

Start with `attention.py`. `multimodal.py` is for images next to text, `recurrent.py` for recurrent
layers, and `enabling.py` replaces functions of the model and of transformers.
"""
