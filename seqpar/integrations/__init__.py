"""seqpar under the interfaces of other libraries. Each file or folder is named for one library."""
