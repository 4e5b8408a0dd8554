package cluster

import (
	"encoding/json"
	"fmt"
	"time"
	"unicode/utf8"
)

// member is what a node says of itself: in gossip's metadata, at the opening of a stream and in its heartbeat.
type member struct {
	Name    string `json:"name,omitempty"`
	Address string `json:"address"`
	Version string `json:"version,omitempty"`
	Started int64  `json:"started"` // Unix milliseconds
}

func (m member) started() time.Time { return time.UnixMilli(m.Started) }

const (
	maxName    = 64  // bytes
	maxVersion = 64  // bytes
	maxMeta    = 512 // memberlist.MetaMaxSize
)

// encode never passes maxMeta: name and version are bounded, and JSON makes at most six bytes of one.
func (m member) encode() ([]byte, error) {
	b, err := json.Marshal(m)
	if err == nil && len(b) > maxMeta {
		err = fmt.Errorf("%d bytes, of which %d fit", len(b), maxMeta)
	}
	if err != nil {
		return nil, fmt.Errorf("cluster: encode metadata: %w", err)
	}
	return b, nil
}

func decodeMember(b []byte) (member, error) {
	var m member
	if len(b) > maxMeta {
		return m, fmt.Errorf("metadata of %d bytes", len(b))
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("metadata: %w", err)
	}
	if len(m.Name) > maxName || len(m.Version) > maxVersion || !utf8.ValidString(m.Name) {
		return m, fmt.Errorf("metadata out of bounds")
	}
	return m, nil
}
