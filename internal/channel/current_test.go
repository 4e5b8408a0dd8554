package channel

import (
	"testing"

	"github.com/google/uuid"
)

func TestCurrentCacheIsBounded(t *testing.T) {
	t.Parallel()
	var c currentCache
	for range maxCurrent + 100 {
		c.put(&Channel{ID: uuid.New(), Version: 1})
	}
	if n := len(c.byID); n != maxCurrent {
		t.Errorf("%d channels, want %d", n, maxCurrent)
	}
}

func TestCurrentCacheKeepsTheNewest(t *testing.T) {
	t.Parallel()
	var c currentCache
	id, tenant := uuid.New(), uuid.New()
	for _, version := range []int64{2, 3, 1} { // a slow read of an older row comes last
		c.put(&Channel{TenantID: tenant, ID: id, Version: version})
	}
	for version, want := range map[int64]bool{1: true, 3: true, 4: false} {
		if _, ok := c.get(tenant, id, version); ok != want {
			t.Errorf("version %d: found %t, want %t", version, ok, want)
		}
	}
	if _, ok := c.get(uuid.New(), id, 1); ok {
		t.Error("another tenant's channel was found")
	}
	c.forget(uuid.New(), id)
	if _, ok := c.get(tenant, id, 3); !ok {
		t.Error("another tenant emptied the cache")
	}
	c.forget(tenant, id)
	if _, ok := c.get(tenant, id, 1); ok {
		t.Error("a forgotten channel was found")
	}
}
