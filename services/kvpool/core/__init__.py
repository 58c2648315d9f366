"""The pool's core: blocks, the requests' block tables, the prefix index. Pure and synchronous."""
