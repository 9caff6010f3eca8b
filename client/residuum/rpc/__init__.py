"""What every process that speaks the contract shares: channels, serving, errors and logs."""
