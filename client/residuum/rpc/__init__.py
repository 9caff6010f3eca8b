"""gRPC code shared by clients and services: channels, credentials, errors and interceptors."""
