"""Run time: the spliced module."""
