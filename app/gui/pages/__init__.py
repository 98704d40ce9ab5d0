"""The places that the navigation leads to."""
