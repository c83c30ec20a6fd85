"""seqpar under the interfaces of other libraries: each file is named for one."""
