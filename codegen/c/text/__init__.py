"""Text: what C is written with.

How a dtype lies in memory (`storage`), how an operation (`spell`) and an index (`indices`) read, which functions a text
may call (`prelude`; of floats `functions`, of C's library `library`, of small matrices `products`); `nest` holds lines
at the level of a loop they belong to, and `values` puts whole expressions there, each as far out of the loops as it can
be.  `updates` is what several points may do to one element.
"""
