"""Softmax attention: its module, operator, call, primitive and backends."""
