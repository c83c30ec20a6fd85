"""How maps of spans get to later spans, one file a transport."""
