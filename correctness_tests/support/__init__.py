"""What tests share: saboteurs, fakes, samples. No test is in here."""
