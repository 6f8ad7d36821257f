"""Models: which one is meant (`resolve`), how large it is (`shape`), and, in workers alone, loading it (`load`)."""
