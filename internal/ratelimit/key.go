package ratelimit

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
)

// Key identifies one subject's budget in one bucket: a 128-bit keyed hash.
// Keys are safe to send between nodes and to show as a digest; nobody without
// the hashing key can find two subjects that meet in one.
type Key struct{ Hi, Lo uint64 }

// String writes 32 hex digits.
func (k Key) String() string { return fmt.Sprintf("%016x%016x", k.Hi, k.Lo) }

// MarshalText implements [encoding.TextMarshaler].
func (k Key) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler]: it reads what String writes.
func (k *Key) UnmarshalText(text []byte) error {
	var b [16]byte
	if len(text) != 2*len(b) {
		return fmt.Errorf("ratelimit: %q is no key", text)
	}
	if _, err := hex.Decode(b[:], text); err != nil {
		return fmt.Errorf("ratelimit: %q is no key", text)
	}
	*k = Key{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
	return nil
}

// Valid tells whether a Hasher can have made the key: stores keep the others for themselves, and are not to be asked for
// one.
func (k Key) Valid() bool { return k.Hi >= minHi }

// minHi is the least first word of a key: tables mark empty and half-written slots by smaller ones.
const minHi = 2

// Hasher makes keys. Every node of a cluster must be given the same secret.
// It is immutable and safe for concurrent use; its methods allocate nothing.
type Hasher struct{ k0, k1 uint64 }

// MinSecret is the least length of a Hasher's secret, in bytes.
const MinSecret = 16

// ErrShortSecret says that a Hasher's secret has fewer than MinSecret bytes.
var ErrShortSecret = errors.New("ratelimit: the key secret is too short")

// NewHasher derives a hasher from a secret that all nodes share. The secret may
// serve other purposes too: what is used here is derived from it under its own
// label.
func NewHasher(secret []byte) (Hasher, error) {
	if len(secret) < MinSecret {
		return Hasher{}, ErrShortSecret
	}
	m := hmac.New(sha256.New, secret)
	m.Write([]byte("converger rate limit keys v1"))
	sum := m.Sum(nil)
	return Hasher{binary.LittleEndian.Uint64(sum), binary.LittleEndian.Uint64(sum[8:])}, nil
}

// Kinds of key parts. Their values are part of the hash and are never reused.
const (
	partBucket byte = iota + 1
	partTenant
	partChannel
	partUser
	partIPv4
	partIPv6
	partAccount
	partDevice
	partSession
	partOperator
	partUnproven
)

// Tenant is the budget of a whole tenant.
func (h Hasher) Tenant(b Bucket, tenant [16]byte) Key {
	return h.bucket(b).id(partTenant, tenant).sum()
}

// Channel is the budget of one channel.
func (h Hasher) Channel(b Bucket, tenant, channel [16]byte) Key {
	return h.bucket(b).id(partTenant, tenant).id(partChannel, channel).sum()
}

// ChannelUnproven is the budget that all addresses share which have not proven
// themselves to the channel by a valid signature: it keeps a stranger who knows
// a channel's id from spending the budget of its provider.
func (h Hasher) ChannelUnproven(b Bucket, tenant, channel [16]byte) Key {
	return h.bucket(b).id(partTenant, tenant).id(partChannel, channel).word(uint64(partUnproven) << 56).sum()
}

// User is the budget of one user of a channel, as a client token names it.
func (h Hasher) User(b Bucket, tenant, channel [16]byte, user string) Key {
	return h.bucket(b).id(partTenant, tenant).id(partChannel, channel).text(partUser, user).sum()
}

// IP is the budget of a client address. IPv4-mapped IPv6 counts as IPv4, IPv6
// counts by its /64, which one customer holds as a whole; zones are ignored.
func (h Hasher) IP(b Bucket, addr netip.Addr) Key {
	return h.bucket(b).addr(addr).sum()
}

// Network is what counts as one client address, for [Hasher.IP] and for whoever
// counts addresses otherwise: IPv4 as it is, of IPv6 the first address of the
// /64, IPv4-mapped IPv6 as IPv4; zones are ignored.
func Network(a netip.Addr) netip.Addr {
	a = a.Unmap()
	if a.Is4() {
		return a
	}
	b := a.As16()
	clear(b[8:])
	return netip.AddrFrom16(b)
}

// AddressText is how the budget of an address is shown: as in RFC 5952, of IPv6
// the /64.
func AddressText(addr netip.Addr) string {
	addr = addr.Unmap().WithZone("")
	if addr.Is6() {
		p, _ := addr.Prefix(64) // 64 is in its range
		return p.String()
	}
	return addr.String()
}

// ChannelIP is what one address does to one channel, such as bad signatures.
func (h Hasher) ChannelIP(b Bucket, tenant, channel [16]byte, addr netip.Addr) Key {
	return h.bucket(b).id(partTenant, tenant).id(partChannel, channel).addr(addr).sum()
}

// Account is the budget of a login name. The caller passes its canonical form
// (trimmed, normalised, case-folded): the same text that finds the account.
func (h Hasher) Account(b Bucket, canonical string) Key {
	return h.bucket(b).text(partAccount, canonical).sum()
}

// AccountDevice is the budget of a login name on a device that has signed in to
// it before, so that strangers' failures do not lock its owner out.
func (h Hasher) AccountDevice(b Bucket, canonical, device string) Key {
	return h.bucket(b).text(partAccount, canonical).text(partDevice, device).sum()
}

// Session is the budget of a web session, named by its digest.
func (h Hasher) Session(b Bucket, digest [32]byte) Key {
	return h.bucket(b).text(partSession, string(digest[:])).sum()
}

// Operator is the budget of an operator token.
func (h Hasher) Operator(b Bucket, token [16]byte) Key {
	return h.bucket(b).id(partOperator, token).sum()
}

// sip is SipHash-1-3 with 128 bits of output (the reference implementation's
// variant for hash tables) over whole words. Every part is a header word, kind
// and length, and then its bytes, zero padded; the header makes the encoding
// injective, so the length that SipHash itself appends is not needed.
type sip struct{ v0, v1, v2, v3 uint64 }

func (h Hasher) start() sip {
	return sip{
		h.k0 ^ 0x736f6d6570736575, h.k1 ^ 0x646f72616e646f6d ^ 0xee,
		h.k0 ^ 0x6c7967656e657261, h.k1 ^ 0x7465646279746573,
	}
}

// bucket begins a key with the bucket's name, since numbers may change.
func (h Hasher) bucket(b Bucket) sip { return h.start().text(partBucket, b.String()) }

func sipRound(v0, v1, v2, v3 uint64) (uint64, uint64, uint64, uint64) {
	v0 += v1
	v1 = bits.RotateLeft64(v1, 13) ^ v0
	v0 = bits.RotateLeft64(v0, 32)
	v2 += v3
	v3 = bits.RotateLeft64(v3, 16) ^ v2
	v0 += v3
	v3 = bits.RotateLeft64(v3, 21) ^ v0
	v2 += v1
	v1 = bits.RotateLeft64(v1, 17) ^ v2
	v2 = bits.RotateLeft64(v2, 32)
	return v0, v1, v2, v3
}

func (s sip) word(m uint64) sip {
	v0, v1, v2, v3 := sipRound(s.v0, s.v1, s.v2, s.v3^m)
	return sip{v0 ^ m, v1, v2, v3}
}

func (s sip) id(kind byte, id [16]byte) sip {
	return s.word(uint64(kind)<<56 | 16).
		word(binary.LittleEndian.Uint64(id[:8])).
		word(binary.LittleEndian.Uint64(id[8:]))
}

func (s sip) text(kind byte, t string) sip {
	s = s.word(uint64(kind)<<56 | uint64(len(t)))
	for len(t) >= 8 {
		s = s.word(uint64(t[0]) | uint64(t[1])<<8 | uint64(t[2])<<16 | uint64(t[3])<<24 |
			uint64(t[4])<<32 | uint64(t[5])<<40 | uint64(t[6])<<48 | uint64(t[7])<<56)
		t = t[8:]
	}
	if len(t) > 0 {
		var m uint64
		for i := range len(t) {
			m |= uint64(t[i]) << (8 * i)
		}
		s = s.word(m)
	}
	return s
}

func (s sip) addr(a netip.Addr) sip {
	a = a.Unmap()
	if a.Is4() {
		b := a.As4()
		return s.word(uint64(partIPv4)<<56 | 4).word(uint64(binary.BigEndian.Uint32(b[:])))
	}
	b := a.As16()
	return s.word(uint64(partIPv6)<<56 | 8).word(binary.LittleEndian.Uint64(b[:8]))
}

func (s sip) sum() Key {
	v0, v1, v2, v3 := s.v0, s.v1, s.v2^0xee, s.v3
	for range 3 {
		v0, v1, v2, v3 = sipRound(v0, v1, v2, v3)
	}
	hi := v0 ^ v1 ^ v2 ^ v3
	v1 ^= 0xdd
	for range 3 {
		v0, v1, v2, v3 = sipRound(v0, v1, v2, v3)
	}
	return Key{max(hi, minHi), v0 ^ v1 ^ v2 ^ v3}
}
