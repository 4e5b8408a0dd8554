package ratelimit

// Gates is the number of budgets of which memory is held.
func (t *Login) Gates() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.gates)
}
