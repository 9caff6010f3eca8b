"""Who may call what: TLS, tokens and tenants, and the table of rights."""
