"""The attention that an enabled model's layers call in place of transformers' functions.

Start with `attention.py`. `multimodal.py` handles models of images and text, `recurrent.py` handles
recurrent layers, and `enabling.py` replaces functions of the model and of transformers.
"""
