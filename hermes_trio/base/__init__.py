"""What every layer may use: settings, structs, redaction, lazy attributes. Imports nothing of ours."""
