"""Running a request: reserving resources, opening and sealing its capture, generating, and changing its steering."""
