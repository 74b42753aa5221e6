"""The package that the examples share: everything that is not what an example is named after."""
