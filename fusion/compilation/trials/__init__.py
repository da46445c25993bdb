"""Times alternatives for a product: all of them (`measure`, for `mode="max-autotune"`), or close calls alone."""
