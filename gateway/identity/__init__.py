"""Who asks: operators, tenant admins and callers, by tokens of issuers, API keys and the operators' token."""
