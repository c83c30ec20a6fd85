"""The attention that an enabled model's layers call in place of transformers' functions.

Start with `attention.py`. `own_attention.py` is for layers that compute attention themselves,
`multimodal.py` for images next to text, and `enabling.py` puts everything in place.
"""
