package cluster

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"strconv"
)

// ID names one start of one node: random, made anew at each start, never 0. A node that restarts, also at the same address
// and under the same name, is another member; what its earlier self counted stays apart from what it counts now.
type ID uint64

// String writes 16 hex digits.
func (id ID) String() string { return fmt.Sprintf("%016x", uint64(id)) }

// ParseID reads what [ID.String] writes.
func ParseID(s string) (ID, error) {
	n, err := strconv.ParseUint(s, 16, 64)
	if err != nil || n == 0 || len(s) != 16 {
		return 0, fmt.Errorf("cluster: %q is no id of a member", s)
	}
	return ID(n), nil
}

func newID() ID {
	for {
		var b [8]byte
		rand.Read(b[:])
		if id := ID(binary.BigEndian.Uint64(b[:])); id != 0 {
			return id
		}
	}
}
