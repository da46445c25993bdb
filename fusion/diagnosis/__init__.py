"""Diagnosis: whether a program computes what eager computes (`verification`), and what makes it differ
(`bisection`).
"""
