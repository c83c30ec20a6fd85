"""How near to the bound are plans, and how long does planning take?"""
