"""seqpar inside other libraries and under their interfaces: each file is named for one."""
