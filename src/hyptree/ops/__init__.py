"""Functions worth a kernel, one folder each: ``reference.py`` in plain torch defines it, ``triton.py`` is the kernel.

``__init__.py`` of a folder chooses between them: the kernel where it is available and the input fits.
"""
