"""One configuration in one fresh process, measured until a client holds what was captured."""
