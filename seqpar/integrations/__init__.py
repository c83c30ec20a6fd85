"""seqpar inside other libraries, a module or folder each, imported when it is asked for."""
