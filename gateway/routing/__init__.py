"""Which replica or upstream serves a request, and what is known of each."""
