"""Seeing inside: reports and dumps."""
