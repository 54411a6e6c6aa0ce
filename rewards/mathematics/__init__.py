"""Contains rewards that compare mathematical answers, and their shared normal forms and comparisons.

Start reading in `dapo.py`. sympy_equality.py is the comparison of `deepscaler`, `geo3k` and `math` with rule=boxed.
"""
