package whatsapp

import (
	"slices"
	"strings"

	"converger/internal/channel"
)

// MaxIdentity is the longest identity that can be stored, in bytes.
const MaxIdentity = 255

// UserID is the identity by Meta's id of a person, which stays when the number changes.
func UserID(id string) channel.Identity {
	return channel.Identity{Kind: channel.IdentityUserID, Value: id}
}

// Phone is the identity by a telephone number, as the provider writes it: digits that begin with the country's code.
func Phone(number string) channel.Identity {
	return channel.Identity{Kind: channel.IdentityPhone, Value: number}
}

// Participant keeps the identities that can be stored, each once, the given order first; nil if there is none. Behind
// them come the other spellings of the telephone numbers, so that one person is one participant in whichever way its
// number is written; the first identity, to which replies go, stays the provider's own.
func Participant(identities ...channel.Identity) *channel.Participant {
	var kept []channel.Identity
	keep := func(identity channel.Identity) {
		if identity.Value != "" && len(identity.Value) <= MaxIdentity && !slices.Contains(kept, identity) {
			kept = append(kept, identity)
		}
	}
	for _, identity := range identities {
		keep(identity)
	}
	for _, identity := range slices.Clone(kept) {
		if identity.Kind == channel.IdentityPhone {
			keep(Phone(otherSpelling(identity.Value)))
		}
	}
	if kept == nil {
		return nil
	}
	return &channel.Participant{Identities: kept}
}

// otherSpelling is the second way in which WhatsApp and telephone books write a mobile number, "" for numbers that have
// one only. Mexico dropped the 1 between its code 52 and the ten digits in 2019; Brazil put a 9 before the eight digits of
// mobile numbers, which begin with 6 to 9, from 2012 to 2016. WhatsApp ids of earlier accounts kept the form of their time.
func otherSpelling(number string) string {
	const mexico, brazil = "52", "55"
	switch {
	case strings.Trim(number, "0123456789") != "":
		return ""
	case strings.HasPrefix(number, mexico+"1") && len(number) == 13:
		return mexico + number[3:]
	case strings.HasPrefix(number, mexico) && len(number) == 12:
		return mexico + "1" + number[2:]
	case strings.HasPrefix(number, brazil) && len(number) == 13 && number[4] == '9' && number[5] >= '6':
		return number[:4] + number[5:]
	case strings.HasPrefix(number, brazil) && len(number) == 12 && number[4] >= '6':
		return number[:4] + "9" + number[4:]
	}
	return ""
}
