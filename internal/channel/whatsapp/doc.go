// Package whatsapp is what the adapters of WhatsApp have in common, whichever company carries the messages.
//
// It decides: how the items of a batch are counted, so that a broken one harms no other and every one has a number of its
// own; what a location and contact cards become; how much of a part without a mapping is kept; and which spellings of a
// telephone number are one person ([Participant]).
//
// It may import channel (and its payload) and fault. It owns no goroutine and keeps no state. On failure: what has not the
// expected form is rejected alone, or gives nothing; nothing panics. Tests: tables here, and the adapters' own with package
// channeltest.
package whatsapp
