"""seqpar under the interfaces of other libraries; each file or folder is named for one library."""
