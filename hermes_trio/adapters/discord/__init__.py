"""Discord: the gateway connection, the REST client and the adapter that joins them."""
