"""Webhooks: routes, signatures, filters, templates, and the receiver that answers `/webhooks/…`."""
