"""Tables and figures from the samples of finished runs. Imports no torch: a laptop rebuilds them."""
