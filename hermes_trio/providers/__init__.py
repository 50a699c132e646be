"""The models that ship with the package: two wire protocols, the offline `demo`, and the routes that name them."""
