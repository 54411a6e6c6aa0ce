"""Holds rewards that compare mathematical answers, and the normal forms and comparisons that they share.

Start reading in `dapo.py`; sympy_equality.py has the comparison of `deepscaler`, `geo3k` and of `math` with rule=boxed.
"""
