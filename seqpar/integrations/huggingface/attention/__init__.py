"""What a model's attention layers call instead of transformers' functions.

Start with `attention.py`. `own_attention.py` and `traced_scores.py` are for layers that compute
attention by themselves, and `multimodal.py` for images next to text.
"""
