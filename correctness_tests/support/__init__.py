"""What tests share: fakes, samples. No test is in here."""
