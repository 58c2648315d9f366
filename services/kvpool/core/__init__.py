"""The pool: blocks, the requests that hold them, and what each stores. Pure and synchronous."""
