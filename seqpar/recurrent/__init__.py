"""Recurrent attention: linear attention whose states decay, or forget, as the data say."""
