"""What both sides share: numbers and messages. Imports neither verl nor SGLang."""
