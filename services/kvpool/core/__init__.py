"""The pool itself: blocks, who holds them, and what each one stores. Pure and synchronous."""
