"""Every use of private parts of torch and Lightning, each with a test that fails when it changes."""
