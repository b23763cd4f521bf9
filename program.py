raise SystemExit(x)
