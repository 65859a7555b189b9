"""The measurements of one model and one text as one HTML page that needs no network: the report."""
